"""Tools for tests, shipped: compare what runs recorded."""
