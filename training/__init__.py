"""From recorded launches to the model that the package ships; see docs/training.md."""
