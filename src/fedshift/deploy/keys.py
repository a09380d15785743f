"""Certificates and node keys: a CA of the federation's own, the server's certificate, a key for every party."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_YEARS, SERVER_DAYS = 10, 825


def make_ca(name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A certificate authority for one federation."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _named(f"{name} (fedshift federation)")
    usage = x509.KeyUsage(*(flag in (5, 6) for flag in range(9)))  # signs certificates and revocations, nothing else
    whole = (
        _builder(subject, subject, key, datetime.timedelta(days=365 * CA_YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, whole.sign(key, hashes.SHA384())


def make_server(
    host: str, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The server's key and its certificate for ``host``, and for the machine itself."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    whole = (
        _builder(_named(host), ca.subject, key, datetime.timedelta(days=SERVER_DAYS))
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
    )
    return key, whole.sign(ca_key, hashes.SHA384())


def make_node_key() -> tuple[ec.EllipticCurvePrivateKey, str]:
    """A party's key, and its public half as one line."""
    key = ec.generate_private_key(ec.SECP384R1())
    return key, public_line(key)


def public_line(key: ec.EllipticCurvePrivateKey) -> str:
    """The public half of a key as OpenSSH writes it."""
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return key.public_key().public_bytes(*form).decode()


def same_key(line: str, other: bytes) -> bool:
    """Whether a public line is this key, in OpenSSH's form or PEM.

    >>> key, line = make_node_key()
    >>> pem = key.public_key().public_bytes(
    ...     serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    >>> same_key(line, pem), same_key(line, make_node_key()[1].encode()), same_key(line, b"")
    (True, False, False)
    """
    try:
        mine = serialization.load_ssh_public_key(line.encode())
        pem = other.lstrip().startswith(b"-----")
        theirs = serialization.load_pem_public_key(other) if pem else serialization.load_ssh_public_key(other)
    except (ValueError, UnsupportedAlgorithm):
        return False
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return mine.public_bytes(*form) == theirs.public_bytes(*form)


def write_secret(path: Path, key: ec.EllipticCurvePrivateKey, openssh: bool = False) -> None:
    """A private key that only its owner can read."""
    kind = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    text = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """A certificate as PEM."""
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + lasts)
    )
