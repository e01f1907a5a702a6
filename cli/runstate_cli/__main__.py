"""`python -m runstate_cli`: the `runstate` command without the console script."""

from runstate_cli import main

if __name__ == "__main__":
    main()
