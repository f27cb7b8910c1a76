"""Training drafters: data the target writes, blocks at random anchors, losses, checkpoints, evaluation."""
