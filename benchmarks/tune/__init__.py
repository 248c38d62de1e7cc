"""The tuner: spaces are recorded on a GPU, and tuners compared over them."""
