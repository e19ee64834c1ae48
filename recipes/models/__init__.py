"""What the recipes train: Lightning modules that any of the trainers can run."""
