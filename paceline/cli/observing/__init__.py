"""Commands that read the event files of runs."""
