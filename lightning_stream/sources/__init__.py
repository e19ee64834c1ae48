"""The kinds of sources, each with its reader."""
