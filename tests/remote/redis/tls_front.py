"""Certificates, and TLS in front of a real server: the embedded Valkey is built without it."""

from __future__ import annotations

import datetime
import ipaddress
import select
import socket
import ssl
import struct
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.fronts import Front


class Authority:
    """A certificate authority whose files lie in `folder`; `ca_file` is what trusts it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        self.ca_file = folder / "ca.pem"
        made = self._made(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))
        self.ca_file.write_bytes(made)

    def certify(self, host: str) -> tuple[Path, Path]:
        """Files of a certificate for a host name or address, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        try:
            known: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            known = x509.DNSName(host)
        cert_file, key_file = (self._folder / f"{host}.{kind}" for kind in ("pem", "key"))
        cert_file.write_bytes(self._made(name, key, x509.SubjectAlternativeName([known])))
        form = serialization.PrivateFormat.PKCS8
        plain = serialization.NoEncryption()
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
        return cert_file, key_file

    def _made(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        unsigned = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(extension, critical=False)
        )
        signed = unsigned.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


class TlsFront(Front):
    """Speaks TLS to clients and plain to the server at `port_behind`, byte for byte.

    `client_ca`: also asks clients for a certificate; cuts off, without a word, one by the authority
    that it `refuses`. `also_plain`: who does not begin with TLS is
    passed on as well, as other servers in a test are.
    """

    def __init__(
        self,
        port_behind: int,
        certificate: tuple[Path, Path],
        *,
        client_ca: Path | None = None,
        refuses: str = "",
        also_plain: bool = False,
        port: int = 0,
    ) -> None:
        super().__init__(port)
        self._behind = port_behind
        self._also_plain = also_plain
        self._refuses = refuses
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(*certificate)
        if client_ca is not None:
            self._tls.verify_mode = ssl.CERT_REQUIRED
            self._tls.load_verify_locations(client_ca)
        self.drip: float | None = None

    def show(self, certificate: tuple[Path, Path]) -> None:
        """Have this certificate from the next connection on."""
        self._tls.load_cert_chain(*certificate)

    def serve(self, client: socket.socket) -> None:
        is_tls = client.recv(1, socket.MSG_PEEK) == b"\x16"
        if is_tls or not self._also_plain:
            client = self._tls.wrap_socket(client, server_side=True)
            if self._refuses and self._refuses in str(client.getpeercert()):
                at_once = struct.pack("ii", True, 0)  # what is under way is lost
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                client.close()
                return
        server = socket.create_connection(("127.0.0.1", self._behind))
        self._sockets += [client, server]
        with client, server:
            self._pass(client, server)

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        # One thread for both ways: two must not use one TLS connection at once.
        while True:
            buffered = isinstance(client, ssl.SSLSocket) and client.pending()
            readable = [client] if buffered else select.select([client, server], [], [])[0]
            for source in readable:
                data = source.recv(65536)
                if not data:
                    return
                other = server if source is client else client
                step = 1 if self.drip is not None and source is server else len(data)
                for start in range(0, len(data), step):
                    other.sendall(data[start : start + step])
                    if step == 1 and len(data) > 1:
                        threading.Event().wait(self.drip)
