"""``python -m fedshift.cli``."""

from fedshift.cli import main

if __name__ == "__main__":
    main()
