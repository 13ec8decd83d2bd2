"""Ways to damage a file: each takes its path, that of another file of the kind (or None) and a source of random
numbers."""
import os
import shutil


def size_of(path):
    return os.path.getsize(path)


def flip(path, _other, draw):
    with open(path, "r+b") as file:
        file.seek(draw.randrange(size_of(path)))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))


def truncate(path, _other, draw):
    os.truncate(path, draw.randrange(size_of(path)))


def empty(path, _other, _draw):
    os.truncate(path, 0)


def extend(path, _other, draw):
    with open(path, "ab") as file:
        file.write(draw.randbytes(draw.choice((1, 8, 4096))))


def delete(path, _other, _draw):
    os.remove(path)


def directory(path, _other, _draw):
    os.remove(path)
    os.mkdir(path)


def zero(path, _other, draw):
    """A block that a crash left unwritten."""
    size = size_of(path)
    with open(path, "r+b") as file:
        begin = draw.randrange(size // 2 + 1)
        count = max(1, min(size - begin, 512))
        file.seek(begin)
        file.write(bytes(count))


def swap(path, other, draw):
    if other is None or other == path:
        return garbage(path, other, draw)
    shutil.copyfile(other, path)
    return None


def garbage(path, _other, draw):
    with open(path, "wb") as file:
        file.write(draw.randbytes(draw.randrange(1, 3000)))


def link_to_itself(path, _other, _draw):
    os.remove(path)
    os.symlink(os.path.basename(path), path)


def device(path, _other, _draw):
    """A file that never ends."""
    os.remove(path)
    os.symlink("/dev/zero", path)


DAMAGES = {function.__name__: function for function in
           (flip, truncate, empty, extend, delete, directory, zero, swap, garbage, link_to_itself, device)}
