"""The version, said once: CMake and pyproject.toml read it here."""

__version__ = "0.1.0"
