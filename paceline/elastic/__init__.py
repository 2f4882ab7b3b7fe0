"""Who is alive, and how training goes on when that changes."""
