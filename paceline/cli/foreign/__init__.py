"""The command lines of other projects, understood."""
