"""The engines that start workers, as their variables tell: an identity and an address. No torch."""
