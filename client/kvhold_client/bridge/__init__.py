"""Cache events in other systems' formats, from outside the daemon: `kvhold bridge`."""
