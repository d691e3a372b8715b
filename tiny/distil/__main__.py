"""`python -m tiny.distil`. Worker processes import this file too, so it imports nothing at the top."""

if __name__ == "__main__":
    import sys

    from tiny.distil.command import main

    sys.exit(main())
