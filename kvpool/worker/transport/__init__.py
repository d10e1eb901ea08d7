"""Processes of one engine: messages from the scheduler to its workers, and their lives."""
