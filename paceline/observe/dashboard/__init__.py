"""Runs in a browser: sums over ranges of steps, the data of each view, and a server of the page."""
