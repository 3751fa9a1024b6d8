"""Certificates for tests."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass
class Authority:
    """Signs certificates for localhost and addresses. It writes ca.pem, and NAME.pem and NAME.key for each
    certificate."""

    folder: Path
    addresses: Sequence[ipaddress.IPv4Address] = ()

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        self._certificate = self._signed(self._name, self._key, ca=True)
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def sign(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key, ca=False)
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, plain))
        return paths

    @property
    def _alternatives(self) -> list[x509.GeneralName]:
        return [x509.DNSName("localhost"), *map(x509.IPAddress, self.addresses)]

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(self._alternatives), critical=False)
        )
        return made.sign(self._key, hashes.SHA256())
