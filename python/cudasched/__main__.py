"""``python -m cudasched``."""

from cudasched.cli import main

if __name__ == "__main__":
    main()
