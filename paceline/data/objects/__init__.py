"""What the objects of a script hold: seen, compared, put back, and kept when the loop changes it."""
