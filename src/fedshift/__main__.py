"""``python -m fedshift``, where no script is installed."""

from fedshift.cli import main

if __name__ == "__main__":
    main()
