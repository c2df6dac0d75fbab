//! TTLV, the encoding of KMIP's messages: of each item a tag of three bytes, a type, a
//! length of four bytes, and the value, padded to a multiple of eight bytes (KMIP 1.4, 9.1).

use std::fmt;

use zeroize::Zeroizing;

/// An item of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub tag: u32,
    pub value: Value,
}

/// A value of the types that this driver's messages have.
#[derive(Clone, PartialEq, Eq)]
pub enum Value {
    Structure(Vec<Item>),
    Integer(i32),
    Enumeration(u32),
    Text(String),
    Bytes(Zeroizing<Vec<u8>>),
    /// Of another type.
    Other,
}

/// Without texts and bytes, which may be secrets.
impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Structure(items) => f.debug_tuple("Structure").field(items).finish(),
            Self::Integer(number) => f.debug_tuple("Integer").field(number).finish(),
            Self::Enumeration(number) => f.debug_tuple("Enumeration").field(number).finish(),
            Self::Text(text) => write!(f, "Text({} bytes)", text.len()),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
            Self::Other => f.write_str("Other"),
        }
    }
}

/// The bytes before a value.
pub const HEADER: usize = 8;
/// Structures within structures; a response has three.
const DEEPEST: usize = 8;

const STRUCTURE: u8 = 1;
const INTEGER: u8 = 2;
const ENUMERATION: u8 = 5;
const TEXT: u8 = 7;
const BYTES: u8 = 8;

impl Item {
    pub fn structure(tag: u32, items: Vec<Self>) -> Self {
        let value = Value::Structure(items);
        Self { tag, value }
    }

    pub fn integer(tag: u32, number: i32) -> Self {
        let value = Value::Integer(number);
        Self { tag, value }
    }

    pub fn enumeration(tag: u32, number: u32) -> Self {
        let value = Value::Enumeration(number);
        Self { tag, value }
    }

    pub fn text(tag: u32, text: &str) -> Self {
        let value = Value::Text(text.to_owned());
        Self { tag, value }
    }

    pub fn bytes(tag: u32, bytes: &[u8]) -> Self {
        let value = Value::Bytes(Zeroizing::new(bytes.to_vec()));
        Self { tag, value }
    }

    /// The first item of that tag in this structure.
    pub fn get(&self, tag: u32) -> Option<&Self> {
        match &self.value {
            Value::Structure(items) => items.iter().find(|item| item.tag == tag),
            _ => None,
        }
    }

    /// The value of an enumeration in this structure.
    pub fn enumeration_of(&self, tag: u32) -> Option<u32> {
        match self.get(tag)?.value {
            Value::Enumeration(number) => Some(number),
            _ => None,
        }
    }

    /// The text of an item in this structure.
    pub fn text_of(&self, tag: u32) -> Option<&str> {
        match &self.get(tag)?.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The bytes of an item in this structure.
    pub fn bytes_of(&self, tag: u32) -> Option<&[u8]> {
        match &self.get(tag)?.value {
            Value::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The item as it is sent.
    pub fn encode(&self) -> Zeroizing<Vec<u8>> {
        // A buffer that grows would leave copies of a passphrase behind.
        let mut out = Zeroizing::new(Vec::with_capacity(self.encoded_len()));
        self.encode_to(&mut out);
        out
    }

    fn value_len(&self) -> usize {
        match &self.value {
            Value::Structure(items) => items.iter().map(Self::encoded_len).sum(),
            Value::Integer(_) | Value::Enumeration(_) => 4,
            Value::Text(text) => text.len(),
            Value::Bytes(bytes) => bytes.len(),
            Value::Other => 0,
        }
    }

    fn encoded_len(&self) -> usize {
        HEADER + padded(self.value_len())
    }

    fn encode_to(&self, out: &mut Vec<u8>) {
        let kind = match &self.value {
            Value::Structure(_) => STRUCTURE,
            Value::Integer(_) => INTEGER,
            Value::Enumeration(_) => ENUMERATION,
            Value::Text(_) => TEXT,
            Value::Bytes(_) | Value::Other => BYTES,
        };
        out.extend_from_slice(&self.tag.to_be_bytes()[1..]);
        out.push(kind);
        let len = u32::try_from(self.value_len()).expect("a request is short");
        out.extend_from_slice(&len.to_be_bytes());
        let begin = out.len();
        match &self.value {
            Value::Structure(items) => items.iter().for_each(|item| item.encode_to(out)),
            Value::Integer(number) => out.extend_from_slice(&number.to_be_bytes()),
            Value::Enumeration(number) => out.extend_from_slice(&number.to_be_bytes()),
            Value::Text(text) => out.extend_from_slice(text.as_bytes()),
            Value::Bytes(bytes) => out.extend_from_slice(bytes),
            Value::Other => {}
        }
        out.resize(begin + padded(out.len() - begin), 0);
    }

    /// The item that these bytes are, and nothing besides. None if they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        match decode_first(bytes, DEEPEST)? {
            (item, []) => Some(item),
            _ => None,
        }
    }
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// The bytes of a value, with its padding, after this header of an item.
pub fn rest_of(header: [u8; HEADER]) -> usize {
    let [.., a, b, c, d] = header;
    let len = u32::from_be_bytes([a, b, c, d]);
    usize::try_from(len).map_or(usize::MAX, |len| {
        len.checked_next_multiple_of(8).unwrap_or(usize::MAX)
    })
}

/// The first item, and what follows it.
fn decode_first(bytes: &[u8], depth: usize) -> Option<(Item, &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
    let [t0, t1, t2, kind, a, b, c, d] = *header;
    let len = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    let (value, rest) = rest.split_at_checked(rest_of(*header))?;
    let value = &value[..len];
    let number = || value.try_into().ok();
    let value = match kind {
        STRUCTURE => Value::Structure(decode_all(value, depth.checked_sub(1)?)?),
        INTEGER => Value::Integer(i32::from_be_bytes(number()?)),
        ENUMERATION => Value::Enumeration(u32::from_be_bytes(number()?)),
        TEXT => Value::Text(str::from_utf8(value).ok()?.to_owned()),
        BYTES => Value::Bytes(Zeroizing::new(value.to_vec())),
        _ => Value::Other,
    };
    let tag = u32::from_be_bytes([0, t0, t1, t2]);
    Some((Item { tag, value }, rest))
}

fn decode_all(mut bytes: &[u8], depth: usize) -> Option<Vec<Item>> {
    let mut items = Vec::new();
    while !bytes.is_empty() {
        let (item, rest) = decode_first(bytes, depth)?;
        items.push(item);
        bytes = rest;
    }
    Some(items)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_item() -> impl Strategy<Value = Item> {
        let leaf = prop_oneof![
            any::<i32>().prop_map(Value::Integer),
            any::<u32>().prop_map(Value::Enumeration),
            "\\PC{0,20}".prop_map(Value::Text),
            prop::collection::vec(any::<u8>(), 0..20)
                .prop_map(|bytes| Value::Bytes(Zeroizing::new(bytes))),
        ];
        let tagged = |value| (0_u32..1 << 24, value).prop_map(|(tag, value)| Item { tag, value });
        tagged(leaf.boxed()).prop_recursive(4, 32, 5, move |inner| {
            let items = prop::collection::vec(inner, 0..5);
            tagged(items.prop_map(Value::Structure).boxed())
        })
    }

    #[test]
    fn texts_and_bytes_are_not_shown() {
        let items = vec![Item::text(1, "password"), Item::bytes(2, b"passphrase")];
        let shown = format!("{:?}", Item::structure(3, items));
        assert!(shown.contains("Text(8 bytes)"), "{shown}");
        assert!(shown.contains("Bytes(10 bytes)"), "{shown}");
        assert!(!shown.contains("pass"), "{shown}");
    }

    /// The examples of KMIP 1.4, 9.1.2.
    #[test]
    fn items_are_encoded_as_in_the_specification() {
        let hex = |text: &str| -> Vec<u8> {
            let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b' ').collect();
            let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
            pairs
                .map(|pair| u8::from_str_radix(pair, 16).unwrap())
                .collect()
        };
        for (item, expected) in [
            (
                Item::integer(0x42_0020, 8),
                "42002002 00000004 00000008 00000000",
            ),
            (
                Item::enumeration(0x42_0020, 255),
                "42002005 00000004 000000FF 00000000",
            ),
            (
                Item::text(0x42_0020, "Hello World"),
                "42002007 0000000B 48656C6C 6F20576F 726C6400 00000000",
            ),
            (
                Item::bytes(0x42_0020, &[1, 2, 3]),
                "42002008 00000003 01020300 00000000",
            ),
            (
                Item::structure(
                    0x42_0020,
                    vec![
                        Item::enumeration(0x42_0004, 254),
                        Item::integer(0x42_0005, 255),
                    ],
                ),
                "42002001 00000020 42000405 00000004 000000FE 00000000 \
                 42000502 00000004 000000FF 00000000",
            ),
        ] {
            assert_eq!(*item.encode(), hex(expected), "{item:?}");
            assert_eq!(Item::decode(&hex(expected)), Some(item));
        }
    }

    #[test]
    fn items_of_other_types_are_passed_over() {
        let date = b"\x42\x00\x92\x09\0\0\0\x08\0\0\0\0\0\0\0\x01";
        let text = Item::text(0x42_0020, "after");
        let mut all = vec![0x42, 0, 0x20, 1, 0, 0, 0, 32];
        all.extend_from_slice(date);
        all.extend_from_slice(&text.encode());
        let item = Item::decode(&all).unwrap();
        assert_eq!(item.text_of(0x42_0020), Some("after"));
        assert_eq!(item.text_of(0x42_0092), None);
    }

    #[test]
    fn structures_without_end_are_refused() {
        let mut item = Item::integer(1, 1);
        for _ in 0..DEEPEST {
            item = Item::structure(1, vec![item]);
        }
        assert!(Item::decode(&item.encode()).is_some());
        let deeper = Item::structure(1, vec![item]);
        assert_eq!(Item::decode(&deeper.encode()), None);
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(item in any_item()) {
            let bytes = item.encode();
            prop_assert_eq!(Item::decode(&bytes), Some(item));
            for cut in 0..bytes.len() {
                prop_assert_eq!(Item::decode(&bytes[..cut]), None);
            }
        }

        #[test]
        fn no_bytes_are_too_odd(
            item in any_item(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let mut bytes = item.encode();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let _ = Item::decode(&bytes);
        }
    }
}
