"""What a run measures at its loaders, why it waits for data, and who gets the figures. Nothing here needs torch."""
