"""Trainers beside Lightning: a plain torch loop, and Composer."""
