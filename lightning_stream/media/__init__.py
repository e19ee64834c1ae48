"""Photos decoded in parts, at the scale that is trained on; what the headers of sounds and videos say."""
