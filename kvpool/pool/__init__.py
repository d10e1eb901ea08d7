"""What the native pool and its twin share: events, metrics and checks around the calls that change blocks."""
