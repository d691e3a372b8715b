"""`python -m tripool` is `tripool`."""

from tripool.cli.main import main

if __name__ == "__main__":
    main()
