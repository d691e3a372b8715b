"""`python -m tripool.train.distil`. Workers import this file too, so nothing is loaded before it is asked for."""

if __name__ == "__main__":
    import sys

    from tripool.train.distil.command import main

    sys.exit(main())
