"""One file per trainer: each speaks the run's `Position` in that trainer's dialect."""
