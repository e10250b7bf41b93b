"""What tests of benchmarks on several ranks share."""


def flags(**settings) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]
