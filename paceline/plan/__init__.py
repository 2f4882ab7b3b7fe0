"""What training costs, before it runs."""
