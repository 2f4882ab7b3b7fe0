"""Workers as processes of this machine, forked from one process that has imported torch, or started anew."""
