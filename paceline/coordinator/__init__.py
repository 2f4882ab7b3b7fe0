"""Who trains: membership, its server, hang detection, agents of machines. No torch."""
