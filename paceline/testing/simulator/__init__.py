"""The simulator: workers, coordinator and launcher of a run in one process, on a virtual clock, from one seed."""
