"""``python -m threefold`` is the ``threefold`` command."""

from threefold.cli.entry import main

if __name__ == "__main__":
    main()
