"""Replays request traces through scheduler processes and a daemon, with real bytes. See `runner.py`."""
