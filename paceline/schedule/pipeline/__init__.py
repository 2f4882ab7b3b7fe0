"""Pipeline schedules as data: the order in which workers compute, send and update. No torch, no clock."""
