"""Other people's models as best-effort programs beside servers, in every arm."""
