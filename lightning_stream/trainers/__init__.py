"""The position in each trainer's checkpoints, and what a trainer shows and logs; `run` is common to them all."""
