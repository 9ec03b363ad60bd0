"""From raw videos to training clips: cuts, measures and captions, each resumable."""
