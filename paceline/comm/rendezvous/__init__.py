"""Rendezvous: how workers find each other and connect."""
