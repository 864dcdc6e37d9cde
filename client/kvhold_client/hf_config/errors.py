"""Why no plan request can be made from a configuration file. All name the field that is missing or cannot be used."""


class HfConfigError(ValueError):
    """Base. `field` is the field's name in config.json, `model_type` the family as far as it is known."""

    def __init__(self, message: str, *, field: str, model_type: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.model_type = model_type


class UnknownModelType(HfConfigError):
    """The family has no rule here."""

    def __init__(self, model_type: str, known: tuple[str, ...]) -> None:
        text = f"model_type {model_type!r} is not known; known are {', '.join(known)}"
        super().__init__(text, field="model_type", model_type=model_type)


class MissingField(HfConfigError):
    """A field without which the cache's size is not known."""

    def __init__(self, field: str, model_type: str) -> None:
        super().__init__(f"{model_type}: field {field!r} is missing", field=field, model_type=model_type)


class UnusableField(HfConfigError):
    """A field whose value does not fit, by itself or with the ranks asked for."""

    def __init__(self, field: str, value: object, constraint: str, model_type: str) -> None:
        text = f"{model_type}: field {field!r} is {value!r}: {constraint}"
        super().__init__(text, field=field, model_type=model_type)
        self.value = value
