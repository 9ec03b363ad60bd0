"""One module per model family: what the engine cannot know. Imported by name when a run starts."""
