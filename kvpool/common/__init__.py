"""Values from outside, made plain or refused by name; and how a command line ends."""
