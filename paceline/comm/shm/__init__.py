"""What processes of one machine share."""
