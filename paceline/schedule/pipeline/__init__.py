"""The schedules of pipelines, as data: who computes, sends and updates what, in which order. No torch, no clock."""
