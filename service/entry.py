"""The program `deltafront`.

Its modules take a second to load. Ctrl-C ends it meanwhile, without a traceback of an import.
"""

import signal


def main() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deltafront.service.cli.main import app

    signal.signal(signal.SIGINT, handler)
    app()


if __name__ == "__main__":
    main()
