"""What the configs build: sources and their conversion, the image classifier, callbacks, the closing summary."""
