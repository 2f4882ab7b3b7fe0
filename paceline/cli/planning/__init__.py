"""Commands that measure a script and look ahead."""
