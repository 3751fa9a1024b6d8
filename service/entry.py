"""The program `deltafront`.

Loading its modules takes a second. Ctrl-C during that time ends the program without a traceback.
"""

import signal


def main() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deltafront.service.cli.main import app

    signal.signal(signal.SIGINT, handler)
    app()


if __name__ == "__main__":
    main()
