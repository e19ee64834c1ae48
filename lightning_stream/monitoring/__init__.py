"""What a training run measures at its loaders, why it waits for data, and who is told. Nothing here needs torch."""
