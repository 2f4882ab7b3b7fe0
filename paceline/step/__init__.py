"""One worker's part of a step."""
