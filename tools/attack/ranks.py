def cases(_attack):
    return []
