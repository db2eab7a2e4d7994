"""`python -m router.cli`, the same as the `splitroute` command."""

from router.cli import main

raise SystemExit(main())
